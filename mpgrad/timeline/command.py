"""`python -m mpgrad timeline FILE`: ten lines about what `Pool.timeline` wrote, and a picture."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mpgrad.timeline.summary import Summary, read

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_command"]


def add_command(commands: Commands) -> None:
    summary = "what the workers of a recorded pool were busy with, and what time was lost to"
    description = f"Shows {summary}, and draws it. Exit status 1 where that cannot be."
    parser = commands.add_parser("timeline", help=summary, description=description)
    parser.add_argument("file", type=Path, metavar="FILE", help="what pool.timeline(FILE) wrote")
    where = "where to draw it: .png, .pdf or .svg (default: beside FILE, as .png)"
    parser.add_argument("--picture", type=Path, metavar="PICTURE", help=where)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """The exit status."""
    try:
        trace = read(options.file)
    except (OSError, ValueError) as error:
        return refused(error)
    print("\n".join(Summary(trace).lines()))
    path = options.picture or options.file.with_suffix(".png")
    try:
        from mpgrad.timeline.picture import draw  # matplotlib takes a second to import, and need not be there

        draw(trace, path)
    except ModuleNotFoundError as error:
        return refused(f"no picture without {error.name}; pip install matplotlib")
    except (OSError, ValueError) as error:
        return refused(error)
    print(f"picture: {path}")
    return 0


def refused(reason: object) -> int:
    print(f"mpgrad timeline: {reason}", file=sys.stderr)
    return 1
