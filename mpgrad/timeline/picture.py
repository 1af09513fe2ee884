"""A trace as a picture: one track a worker, below one for each thread of the caller. Needs matplotlib."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from mpgrad.timeline.summary import Span, merged
from mpgrad.timeline.trace import CALLER, CALLS, Event

__all__ = ["draw"]

WIDTH, ROW, FRAME, DPI = 10.0, 0.32, 1.3, 110  # inches, but for the last

# what is drawn, the later ones over the earlier ones: its name, its colour, and the kinds of slices
WORKER = {
    "around calls": ("#b8b8b8", ("call",)),
    "starting": ("#c9b3e6", ("start",)),
    "transfer": ("#e3c567", ("transfer",)),
    "loading functions": ("#8c6bb1", ("load",)),
    "forward": ("#3b7dd8", ("forward",)),
    "backward": ("#d9662b", ("backward",)),
    "lost to a death": ("#111111", ("lost",)),
    "not answered yet": ("#dddddd", ("open",)),
}
THREAD = {
    "backward, caller's part": ("#f2b48f", ("runs backward",)),
    "packs": ("#4f9d69", ("packs", "pickles")),
    "makes results": ("#8ccf9b", ("makes results",)),
    "waits": ("#eeeeee", ("waits for results", "waits for gradients")),
    "sends, receives": ("#777777", ("sends", "receives")),
}


def draw(trace: dict[str, Any], path: str | os.PathLike[str]) -> None:
    """Write the picture, in the format that the name ends in."""
    tracks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    names = {}
    for each in trace["traceEvents"]:
        track = each["pid"], each["tid"]
        if each["ph"] == "X" and (each["pid"] == CALLER or each["tid"] == CALLS):
            tracks[track].append(each)
        elif each["name"] == "thread_name":
            names[track] = "calls" if each["pid"] != CALLER else f"caller: {each['args']['name']}"
    for number in (each["number"] for each in trace["mpgrad"]["workers"]):
        names[CALLER + number, CALLS] = f"worker {number}"
        tracks.setdefault((CALLER + number, CALLS), [])
    order = sorted(tracks, key=lambda track: (track[0] == CALLER, track))
    figure = Figure(figsize=(WIDTH, FRAME + ROW * len(order)), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    seconds = trace["mpgrad"]["seconds"]
    shown = {}
    for row, track in enumerate(order):
        for name, color in fill(axes, row, tracks[track], track[0] == CALLER, 1e6 * seconds):
            shown[name] = color
    axes.set(xlim=(0, seconds), ylim=(len(order) - 0.4, -0.6), xlabel="seconds")
    axes.set_yticks(range(len(order)), [names[track] for track in order])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    patches = [Patch(color=color, label=name) for name, color in shown.items()]
    figure.legend(handles=patches, loc="outside upper center", ncols=min(6, max(1, len(patches))), frameon=False, fontsize=8)
    figure.savefig(path)


def fill(axes: Axes, row: int, events: Iterable[Event], is_caller: bool, end: float) -> Iterator[tuple[str, str]]:
    """One track; names and colours of what is there."""
    spans: dict[str, list[Span]] = defaultdict(list)
    for each in events:
        spans[each["cat"]].append((each["ts"], each["ts"] + each["dur"]))
    for name, (color, kinds) in (THREAD if is_caller else WORKER).items():
        found = visible((span for kind in kinds for span in spans[kind]), end / (WIDTH * DPI))
        if found:
            bars = [(start / 1e6, (stop - start) / 1e6) for start, stop in found]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=color, linewidth=0)
            yield name, color


def visible(spans: Iterable[Span], pixel: float) -> list[Span]:
    """One bar for spans that are less than half a pixel apart."""
    found: list[Span] = []
    for start, end in merged(spans):
        if found and start - found[-1][1] < pixel / 2:
            found[-1] = found[-1][0], end
        else:
            found.append((start, end))
    return found
