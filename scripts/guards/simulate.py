"""Checks simulated histories of the scheduler, as many as you have time for.

    python scripts/guards/simulate.py --histories 1000000 [--seed N] [--processes 2]
    python scripts/guards/simulate.py --replay SEED

It checks the history of each seed, starting with `--seed` (see `tests/simulation`). For the first
fault it prints the seed, the check that failed and the shortest history that still fails it, and
exits with 1. `--replay` prints one history, which is whole if nothing fails.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "simulation"))

from history import Fault, History, fault_in, in_words, program_of, shortest

AT_ONCE = 500  # histories between two checks of whether another process has found a fault


def faulty_seed(seeds: range) -> int | None:
    """Return the first of these seeds whose history has a fault."""
    return next((seed for seed in seeds if fault_in(program_of(seed)) is not None), None)


def looked_at(seeds: range, processes: int) -> Iterator[tuple[int, int | None]]:
    """Yield how many histories have been checked so far, and the first seed with a fault among the
    last ones."""
    parts = [seeds[start : start + AT_ONCE] for start in range(0, len(seeds), AT_ONCE)]
    counts = itertools.accumulate(map(len, parts))
    if processes == 1:
        yield from zip(counts, map(faulty_seed, parts), strict=True)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from zip(counts, pool.imap(faulty_seed, parts), strict=True)


def replay(seed: int) -> int:
    """Print one history. Return 1 if it has a fault."""
    history = History(program_of(seed), listens=True)
    fault: Fault | None = fault_in(program_of(seed))
    if fault is not None:
        print(in_words(shortest(fault)))
        return 1
    history.run()
    print("\n".join(history.world.events or ()))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--histories", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first history")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--replay", type=int, metavar="SEED", help="print the history of this seed")
    given = parser.parse_args(arguments)
    if given.replay is not None:
        return replay(given.replay)
    started = time.perf_counter()
    count = 0
    for count, seed in looked_at(range(given.seed, given.seed + given.histories), given.processes):  # noqa: B007
        if seed is not None:
            print(
                f"seed {seed}, found within {seed - given.seed + 1} histories, "
                f"{time.perf_counter() - started:.0f} s"
            )
            return replay(seed)
    print(f"{count} histories in {time.perf_counter() - started:.0f} s, no fault")
    return 0


if __name__ == "__main__":
    sys.exit(main())
