"""`python -m mpgrad`: the command line."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

import mpgrad
from mpgrad import doctor

INTERRUPTED = 130  # the exit status of shells


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m mpgrad", description="A worker pool for PyTorch, with gradients."
    )
    parser.add_argument("--version", action="version", version=f"mpgrad {mpgrad.__version__}")
    summary = "doctor: whether a pool works here, what is wrong, and how to fix it; "
    summary += "exit status 1 if no pool can work"
    parser.add_argument("command", metavar="COMMAND", choices=["doctor"], help=summary)
    parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The terminal's encoding must not make this fail.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = doctor.run()
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
