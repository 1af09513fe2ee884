"""How soon a caller hears of a worker that died, where nothing is run again (`Pool(retries=0)`).

A thread kills (SIGKILL) the worker while it runs a call, while it runs a backward, or before the backward that needs its graph.
The time from the kill (in the last case: from the start of the backward) to the `WorkerDiedError` in the caller.

    python scripts/reliability/time_to_error.py --repeats 20
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # whose modules are shared

from common import at_least_1, surroundings

import mpgrad

DELAY = 0.05  # seconds from the start of a call to the kill: it is under way by then
LONGER = 30.0  # seconds that the call would take


class Asleep(torch.autograd.Function):
    """An identity whose backward sleeps."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        time.sleep(LONGER)
        return grad


def killed_meanwhile(pool: mpgrad.Pool, action: Callable[[], object]) -> float:
    """Seconds from the kill to the error that `action` raises."""
    killed = [0.0]

    def kill() -> None:
        killed[0] = time.perf_counter()
        os.kill(pool.stats().workers[0].pid, signal.SIGKILL)

    timer = threading.Timer(DELAY, kill)
    timer.start()
    try:
        action()
    except mpgrad.WorkerDiedError:
        return time.perf_counter() - killed[0]
    finally:
        timer.join()
    raise RuntimeError("the call came to its end, though its worker was killed")


def in_forward(pool: mpgrad.Pool) -> float:
    return killed_meanwhile(pool, lambda: pool.map(time.sleep, [LONGER]))


def in_backward(pool: mpgrad.Pool) -> float:
    (result,) = pool.map(Asleep, [torch.ones(3, requires_grad=True)])
    return killed_meanwhile(pool, lambda: result.sum().backward())


def before_backward(pool: mpgrad.Pool) -> float:
    (result,) = pool.map(torch.exp, [torch.ones(3, requires_grad=True)])
    dead = pool.stats().workers[0].pid
    os.kill(dead, signal.SIGKILL)
    while [worker.pid for worker in pool.stats().workers] in ([dead], []):
        time.sleep(1e-3)
    started = time.perf_counter()
    try:
        result.sum().backward()
    except mpgrad.WorkerDiedError:
        return time.perf_counter() - started
    raise RuntimeError("the backward came to its end, though its graph was lost")


CASES = {"killed in forward": in_forward, "killed in backward": in_backward, "killed before backward": before_backward}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--repeats", type=at_least_1, default=20, metavar="N", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("time_to_error.json"), metavar="FILE", help="default: %(default)s")
    options = parser.parse_args(arguments)
    seconds: dict[str, list[float]] = {name: [] for name in CASES}
    with mpgrad.Pool(processes=1, retries=0) as pool:
        pool.map(abs, [1])  # it has started
        for _ in range(options.repeats):
            for name, case in CASES.items():
                seconds[name].append(case(pool))
    print(f"{'ms until the error':28}{'median':>10}{'worst':>10}")
    for name, each in seconds.items():
        print(f"{name:28}{statistics.median(each) * 1e3:10.2f}{max(each) * 1e3:10.2f}")
    options.out.write_text(json.dumps({"surroundings": surroundings(1), "seconds": seconds}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
