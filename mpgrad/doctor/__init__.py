"""One page for bug reports, and for people whose pool is slow: what mpgrad runs on, what that costs, and what is amiss.

    python -m mpgrad doctor [--json]

It uses the package from outside, as a program would, and nothing of the package imports it. It has to come out whatever is
broken, so `machine`, which looks at this computer, needs no torch, and `steps`, which do, are run by `trial` in a process of
their own. Each gives `findings`.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

import mpgrad
from mpgrad.doctor.findings import as_json, found_by, page, works
from mpgrad.doctor.machine import PROBES
from mpgrad.doctor.trial import tried

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

__all__ = ["add_command"]

TRIAL_SECONDS = 60.0  # torch may be imported twice, from a slow disk; otherwise it takes some 5 s
LONGEST = 86_400


def add_command(commands: Commands) -> None:
    summary = "what mpgrad runs on here, what calls cost, and what is amiss"
    parser = commands.add_parser("doctor", help=summary, description=f"Shows {summary}. Exit status 1 where no pool can work.")
    parser.add_argument("--json", action="store_true", help="the same as JSON")
    parser.add_argument(
        "--timeout",
        type=positive_seconds,
        default=TRIAL_SECONDS,
        metavar="SECONDS",
        help="for the trial of a pool, after which it counts as hung (default: %(default)g)",
    )
    parser.set_defaults(run=run)


def positive_seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) <= LONGEST:
            return seconds
    raise argparse.ArgumentTypeError(f"must be a number above 0, and at most {LONGEST} (given: {text!r})")


def run(options: argparse.Namespace) -> int:
    """The exit status."""
    if sys.stderr.isatty():
        print("mpgrad doctor: trying a pool, some seconds ...", file=sys.stderr)
    findings = [*found_by(PROBES), *tried(options.timeout)]
    print(as_json(mpgrad.__version__, findings) if options.json else page(findings))
    return 0 if works(findings) else 1
