"""What the machine gives: serial loops in as many processes at once, between which nothing travels.

Two CPUs are seldom worth two: they share caches, memory and perhaps a core. A pool that sent its work in no time at all would
be as fast as this; how near it comes says what is left to gain.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from types import TracebackType

import torch
from common import Batch, Function, Outcome
from jobs import backward_at_once
from torch import Tensor

__all__ = ["LoopsAtOnce"]


class LoopsAtOnce:
    """Processes that each have a share of the items already, and loop over it when they are told to."""

    def __init__(self, processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(processes)]
        self._ends = [ours for ours, _ in pairs]
        self._processes = [context.Process(target=loop_when_told, args=(theirs,), daemon=True) for _, theirs in pairs]
        self._given: tuple[Function, int] | None = None
        self._outcome = Outcome([], [])

    def __enter__(self) -> LoopsAtOnce:
        for process in self._processes:
            process.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for process in self._processes:
            process.terminate()
            process.join()

    def run(self, function: Function, batch: Batch) -> Outcome:
        """Loop over the items; what they give is fetched the first time only, to be looked at."""
        if self._given != (function, len(batch.items)):
            self._give(function, batch.items)
        for end in self._ends:
            end.send(None)
        for end in self._ends:
            end.recv()
        return self._outcome

    def _give(self, function: Function, items: Sequence[Tensor]) -> None:
        count = len(self._ends)
        values, gradients = list[Tensor](items), list[Tensor](items)
        for number, end in enumerate(self._ends):
            end.send((function, [item.detach().numpy() for item in items[number::count]]))
        for number, end in enumerate(self._ends):
            for found, place in zip(end.recv(), (values, gradients), strict=True):
                place[number::count] = map(torch.from_numpy, found)
        self._given = function, len(items)
        self._outcome = Outcome(values, gradients)


def loop_when_told(end: Connection) -> None:
    """A function and items: what they give is sent back. None: loop over them once more."""
    torch.set_num_threads(1)
    work: tuple[Function, list[Tensor]] | None = None
    while True:
        given = end.recv()
        if given is not None:
            work = given[0], [torch.from_numpy(array) for array in given[1]]
        assert work is not None
        values, gradients = loop(*work)
        if given is None:
            end.send(None)
        else:
            end.send(([value.numpy() for value in values], [grad.numpy() for grad in gradients if grad is not None]))


def loop(function: Function, items: Sequence[Tensor]) -> Outcome:
    leaves = [item.requires_grad_() for item in (item.detach() for item in items)]
    return backward_at_once(function, Batch(leaves, []))
