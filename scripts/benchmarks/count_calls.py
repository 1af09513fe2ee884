"""Counts the Python functions that the caller calls, in its own thread and the pool's, for a call
or a map of a warm pool.

Counts are the same on every machine, but seconds are not. Each case shows the smallest count of
several runs, because the work of a turn of the pool's thread depends on when it wakes up.
`--functions` lists which functions were called how often.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import mpgrad

RUNS = 20
Counts = collections.Counter[tuple[str, str]]  # by thread and function


def square(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum()


def submit(pool: mpgrad.Pool) -> None:
    pool.submit(abs, -1).result()


def map_four(pool: mpgrad.Pool) -> None:
    pool.map(square, [torch.ones(3) for _ in range(4)])


def map_four_backward(pool: mpgrad.Pool) -> None:
    xs = [torch.ones(3, requires_grad=True) for _ in range(4)]
    torch.stack(pool.map(square, xs)).sum().backward()


CASES: dict[str, tuple[Callable[[mpgrad.Pool], None], dict[str, Any]]] = {
    "submit(f, x).result()": (submit, {}),
    "map of four tensors": (map_four, {}),
    "map of four tensors, backward": (map_four_backward, {"graphs": "keep"}),
    "map of four tensors, eager backward": (map_four_backward, {}),
}


class Counter:
    """Notes calls of Python functions in all threads that start after it was made, and in the
    caller's, while it is on."""

    def __init__(self) -> None:
        self._counts: Counts | None = None
        self._main = threading.get_ident()
        threading.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and (counts := self._counts) is not None:
            code = frame.f_code
            thread = "caller" if threading.get_ident() == self._main else "pool"
            counts[
                thread, f"{Path(code.co_filename).name}:{code.co_firstlineno} {code.co_name}"
            ] += 1

    def counted(self, run: Callable[[mpgrad.Pool], None], pool: mpgrad.Pool) -> Counts:
        counts = self._counts = collections.Counter()
        sys.setprofile(self._note)
        try:
            run(pool)
        finally:
            sys.setprofile(None)
        time.sleep(0.02)  # the pool's thread ends its turn
        self._counts = None
        return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--functions", action="store_true", help="also list the functions")
    parser.add_argument("--json", type=Path, help="a file for the counts")
    options = parser.parse_args()
    found: dict[str, dict[str, int]] = {}
    counter = Counter()
    print(f"{'case':40} {'caller':>7} {'pool':>7}")
    for name, (run, settings) in CASES.items():
        with mpgrad.Pool(2, **settings) as pool:
            for _ in range(RUNS):
                run(pool)
            time.sleep(0.1)  # the pool's thread has reported everything
            runs = [counter.counted(run, pool) for _ in range(RUNS)]
        least = min(runs, key=lambda counts: counts.total())
        sums = {
            thread: sum(n for (own, _), n in least.items() if own == thread)
            for thread in ("caller", "pool")
        }
        found[name] = sums
        print(f"{name:40} {sums['caller']:7} {sums['pool']:7}")
        if options.functions:
            for (thread, function), count in least.most_common():
                print(f"    {thread:8} {count:5} {function}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
