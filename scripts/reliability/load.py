"""Load: figures of docs/reliability.md. Many calls in one pool, and what it holds meanwhile; large maps; large tensors.

Nothing may grow with the calls that a pool has done: memory, descriptors and threads are noted after a fifth of them and
at the end. Each row has a fresh process, so that none finds another's memory.

    python scripts/reliability/load.py --json load.json      # some five minutes
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # whose modules are shared

import growth
from common import at_least_1, limited, surroundings
from figures import Figure, add_options, fail, print_figures, report
from growth import Taken, status
from losses import doubled

import mpgrad

EPILOG = "exit status: 0 if everything was measured, 1 if the time is up, 2 for wrong arguments"

CALLS_OF_A_MAP = 1000
MIB = 2**20
ROW_LIMIT = 600  # seconds
LARGE_TENSOR = 2 * 2**30 + 2**20  # bytes: more than 2 GiB
MEMORY_FOR_IT = 9  # times its bytes: item, slots, copies in the worker, result, gradients
QUICK_SHARE = 1000  # of the work

Row = Callable[[mpgrad.Pool, int], Iterator[Figure]]


def held(pool: mpgrad.Pool) -> dict[str, float]:
    """What the parent and a worker have; of several workers the most."""
    workers = [worker.pid for worker in pool.stats().workers]

    def most(of: Callable[[int], float]) -> float:
        return max(map(of, workers))

    return {
        "MiB of the parent": resident(os.getpid()),
        "MiB of a worker": most(resident),
        "descriptors of the parent": descriptors(os.getpid()),
        "descriptors of a worker": most(descriptors),
        "threads of the parent": status("self", "Threads"),
        "threads of a worker": most(lambda pid: status(pid, "Threads")),
    }


def resident(pid: int) -> float:
    return float(psutil.Process(pid).memory_info().rss / MIB)


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def many_calls(row: str, pool: mpgrad.Pool, calls: int, run: Callable[[mpgrad.Pool, int], object]) -> Iterator[Figure]:
    maps = max(5, calls // CALLS_OF_A_MAP)
    each = calls // maps
    began = time.perf_counter()
    for number in range(maps):
        run(pool, each)
        if number + 1 == maps // 5:
            early = held(pool)
    yield Figure(row, "time", time.perf_counter() - began, "s")
    late = held(pool)
    for name in late:
        yield Figure(row, f"{name}, after a fifth", early[name], "")
        yield Figure(row, f"{name}, at the end", late[name], "")


def tiny_calls(pool: mpgrad.Pool, calls: int) -> Iterator[Figure]:
    numbers = list(range(CALLS_OF_A_MAP))
    yield from many_calls(f"{calls:,} tiny calls", pool, calls, lambda pool, count: pool.map(abs, numbers[:count]))


def calls_with_graphs(pool: mpgrad.Pool, calls: int) -> Iterator[Figure]:
    yield from many_calls(f"{calls:,} calls with graphs, forward and backward", pool, calls, growth.items)


def numbers_in_one_map(pool: mpgrad.Pool, count: int) -> Iterator[Figure]:
    began = time.perf_counter()
    pool.map(abs, range(count))
    yield Figure(f"{count:,} items in one map", "numbers", time.perf_counter() - began, "s")


def tensors_in_one_map(pool: mpgrad.Pool, count: int) -> Iterator[Figure]:
    items = growth.leaves(count)
    began = time.perf_counter()
    with torch.no_grad():
        pool.map(doubled, items)
    yield Figure(f"{count:,} items in one map", "tensors", time.perf_counter() - began, "s")


def many_tensors(pool: mpgrad.Pool, count: int) -> Iterator[Figure]:
    item = growth.leaves(count)
    yield from both(f"an item of {count:,} tensors", growth.taken(lambda: list(pool.map(growth.all_doubled, [item])[0])))


def many_maps(pool: mpgrad.Pool, count: int) -> Iterator[Figure]:
    row = f"{count:,} maps with {growth.MAPS_ITEMS * count:,} graphs held at once"
    yield from both(row, growth.maps(pool, count))


def large_tensor(pool: mpgrad.Pool, size: int) -> Iterator[Figure]:
    row = f"a tensor of {size / 2**30:.3g} GiB"
    if MEMORY_FOR_IT * size > psutil.virtual_memory().available:
        print(f"{row}: left out, it could take more memory than there is", file=sys.stderr)
        return
    yield from both(row, growth.size(pool, size))


def both(row: str, taken: Taken) -> Iterator[Figure]:
    yield Figure(row, "forward", taken.forward, "s")
    yield Figure(row, "backward", taken.backward, "s")


ROWS: dict[str, tuple[Row, int]] = {
    "tiny": (tiny_calls, 1_000_000),
    "graphs": (calls_with_graphs, 100_000),
    "numbers": (numbers_in_one_map, 100_000),
    "tensors": (tensors_in_one_map, 100_000),
    "item": (many_tensors, 10_000),
    "maps": (many_maps, 1_000),
    "large": (large_tensor, LARGE_TENSOR),
}


def run_row(name: str, amount: int, processes: int) -> None:
    """In a process of its own."""
    torch.set_num_threads(1)
    with mpgrad.Pool(processes) as pool:
        growth.items(pool, 4 * processes)  # the first backward of a process imports much of torch
        print(json.dumps([figure.record() for figure in ROWS[name][0](pool, amount)]))


def fresh_row(name: str, amount: int, processes: int) -> list[Figure]:
    command = [sys.executable, __file__, "--row", name, str(amount), str(processes)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, timeout=ROW_LIMIT)
    records = json.loads(ended.stdout.splitlines()[-1])
    return [Figure(record["row"], record["name"], record["value"], record["unit"]) for record in records]


def command_line() -> argparse.ArgumentParser:
    summary = (__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=summary, epilog=EPILOG, allow_abbrev=False)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--processes", type=at_least_1, default=2, metavar="N", help="workers (default: %(default)s)")
    add_options(parser)
    parser.add_argument("--row", nargs=3, help=argparse.SUPPRESS)  # what a fresh process is started with
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = command_line().parse_args(arguments)
    if options.row is not None:
        name, amount, processes = options.row
        run_row(name, int(amount), int(processes))
        return 0
    around = surroundings(options.processes)
    print(f"{around['cpu']}, {around['usable_cpus']} usable CPUs, load average {around['load_average']:.2f} before")
    figures = []
    try:
        with limited(ROW_LIMIT * len(options.rows)):
            for name in options.rows:
                _, amount = ROWS[name]
                found = fresh_row(name, amount // QUICK_SHARE if options.quick else amount, options.processes)
                print_figures(found)
                figures += found
    except TimeoutError as error:
        return fail(error)
    report(options, around, figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
