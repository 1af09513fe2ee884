"""A trace as a picture: one track a worker, below one for each thread of the caller. Needs
matplotlib."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

__all__ = ["draw"]

WIDTH, ROW, FRAME = 10.0, 0.32, 1.3  # inches
DPI = 110
# the kinds of slices, the later ones over the earlier ones, with their names and colours
KINDS = {
    "chunk": ("around items", "#b8b8b8"),
    "forward": ("forward", "#3b7dd8"),
    "backward": ("backward", "#d9662b"),
    "unanswered": ("not answered", "#111111"),
    "pickles": ("pickles", "#8c6bb1"),
    "packs": ("packs", "#4f9d69"),
    "makes results": ("makes results", "#8ccf9b"),
    "waits": ("waits", "#eeeeee"),
}


def draw(events: Sequence[dict[str, Any]], caller: int, path: str | os.PathLike[str]) -> None:
    """Write the picture, in the format that the name ends in; `caller`: the number of its
    process."""
    names = {}
    for event in events:
        track = event["pid"], event["tid"]
        if event["name"] == "process_name" and event["pid"] != caller:
            names[event["pid"], 1] = event["args"]["name"].partition(" (")[0]
        elif event["name"] == "thread_name" and event["pid"] == caller:
            names[track] = f"caller: {event['args']['name']}"
    order = sorted(names, key=lambda track: (track[0] == caller, track))
    figure = Figure(figsize=(WIDTH, FRAME + ROW * len(order)), dpi=DPI, layout="constrained")
    axes = figure.add_subplot()
    patches = []
    for kind, (label, color) in KINDS.items():
        slices = [event for event in events if event["ph"] == "X" and event["cat"] == kind]
        for row, track in enumerate(order):
            own = [event for event in slices if (event["pid"], event["tid"]) == track]
            bars = [(event["ts"] / 1e6, event["dur"] / 1e6) for event in own]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=color, linewidth=0)
        if slices:
            patches.append(Patch(color=color, label=label))
    axes.set(ylim=(len(order) - 0.4, -0.6), xlabel="seconds")
    axes.set_yticks(range(len(order)), [names[track] for track in order])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    figure.legend(
        handles=patches, loc="outside upper center", ncols=len(KINDS), frameon=False, fontsize=8
    )
    figure.savefig(path)
