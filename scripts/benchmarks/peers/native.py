"""Systems whose gradients come from autograd itself, in the caller: loops, threads, and mpgrad."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from peers.case import Function, Outcome


def with_one_backward(losses: Sequence[Tensor], items: Sequence[Tensor]) -> Outcome:
    torch.autograd.backward(torch.stack(tuple(losses)).sum())
    return Outcome(losses, [item.grad for item in items])


class Serial:
    """The loop, with one backward over all items or a backward right after each."""

    def __init__(self, processes: int, threads: int = 1, at_once: bool = False) -> None:
        torch.set_num_threads(threads)
        self._at_once = at_once

    def run(self, function: Function, items: list[Tensor]) -> Outcome:
        losses = []
        for item in items:
            losses.append(function(item))
            if self._at_once:
                torch.autograd.backward(losses[-1])
                losses[-1] = losses[-1].detach()
        if self._at_once:
            return Outcome(losses, [item.grad for item in items])
        return with_one_backward(losses, items)

    def close(self) -> None:
        pass


# --- threads


class AllInThreads(torch.autograd.Function):
    """One node for the whole map, whose forward and backward share the items out over threads (hivemind's way)."""

    @staticmethod
    def forward(ctx: Any, threads: concurrent.futures.Executor, function: Function, *items: Tensor) -> Any:
        def with_graph(item: Tensor) -> tuple[Tensor, Tensor]:
            with torch.enable_grad():
                leaf = item.detach().requires_grad_()
                return leaf, function(leaf)

        ctx.threads, ctx.graphs = threads, list(threads.map(with_graph, items))
        return tuple(loss.detach() for _, loss in ctx.graphs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        def gradient(graph: tuple[Tensor, Tensor], grad: Tensor) -> Tensor:
            leaf, loss = graph
            return torch.autograd.grad(loss, leaf, grad)[0]

        return None, None, *ctx.threads.map(gradient, ctx.graphs, grads)


class Threads:
    def __init__(self, processes: int) -> None:
        torch.set_num_threads(1)
        self._threads = concurrent.futures.ThreadPoolExecutor(processes, initializer=torch.set_num_threads, initargs=(1,))

    def run(self, function: Function, items: list[Tensor]) -> Outcome:
        losses = AllInThreads.apply(self._threads, function, *items)  # type: ignore[no-untyped-call]
        return with_one_backward(losses, items)

    def close(self) -> None:
        self._threads.shutdown()


# --- mpgrad


class Mpgrad:
    def __init__(self, processes: int, **options: Any) -> None:
        import mpgrad

        torch.set_num_threads(1)
        self._pool = mpgrad.Pool(processes, **options)

    def run(self, function: Function, items: list[Tensor]) -> Outcome:
        return with_one_backward(self._pool.map(function, items), items)

    def close(self) -> None:
        self._pool.terminate()
