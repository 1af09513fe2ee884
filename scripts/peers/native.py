"""Systems whose gradients come from autograd itself: loops, threads, torch's own ways, and mpgrad."""

from __future__ import annotations

import concurrent.futures
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.multiprocessing
from losses import large_loss, op_loss, python_loss
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


# --- torch.jit.fork


def fork_python(items: list[Tensor], steps: int) -> list[Tensor]:
    futures = torch.jit.annotate(list[torch.jit.Future[Tensor]], [])
    for item in items:
        futures.append(torch.jit.fork(python_loss, item, steps))
    return [torch.jit.wait(future) for future in futures]


def fork_op(items: list[Tensor]) -> list[Tensor]:
    futures = torch.jit.annotate(list[torch.jit.Future[Tensor]], [])
    for item in items:
        futures.append(torch.jit.fork(op_loss, item))
    return [torch.jit.wait(future) for future in futures]


def fork_large(items: list[Tensor]) -> list[Tensor]:
    futures = torch.jit.annotate(list[torch.jit.Future[Tensor]], [])
    for item in items:
        futures.append(torch.jit.fork(large_loss, item))
    return [torch.jit.wait(future) for future in futures]


class JitFork:
    """Scripted functions only. It has threads for the forward; the backward is the engine's, one thread for a CPU."""

    def __init__(self, processes: int) -> None:
        torch.set_num_threads(1)
        torch.set_num_interop_threads(processes)
        pairs = [(python_loss, fork_python), (op_loss, fork_op), (large_loss, fork_large)]
        self._scripted: dict[Any, Callable[..., list[Tensor]]] = {one: torch.jit.script(all_of) for one, all_of in pairs}

    def run(self, function: Function, items: list[Tensor]) -> Outcome:
        if isinstance(function, partial):
            return with_one_backward(self._scripted[function.func](items, **function.keywords), items)
        return with_one_backward(self._scripted[function](items), items)

    def close(self) -> None:
        pass


# --- torch.distributed.rpc


def rpc_options(folder: str) -> Any:
    import torch.distributed.rpc as rpc

    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    return rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/meeting", _transports=["shm", "uv"])


def serve_rpc(rank: int, world: int, folder: str) -> None:
    import torch.distributed.rpc as rpc

    torch.set_num_threads(1)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world, rpc_backend_options=rpc_options(folder))
    rpc.shutdown()  # waits for the others to do the same


def losses_of(function: Function, items: list[Tensor]) -> list[Tensor]:
    return [function(item) for item in items]


class Rpc:
    """Remote calls of several items each, and distributed autograd, whose backward runs on all workers at once."""

    CALLS = 4  # to each worker: few enough to cost little, enough to balance

    def __init__(self, processes: int) -> None:
        import torch.distributed.rpc as rpc

        torch.set_num_threads(1)
        self._folder = tempfile.TemporaryDirectory()
        self._names = [f"worker{rank}" for rank in range(1, processes + 1)]
        context = torch.multiprocessing.get_context("spawn")
        self._workers = [
            context.Process(target=serve_rpc, args=(rank, processes + 1, self._folder.name)) for rank in range(1, processes + 1)
        ]
        for worker in self._workers:
            worker.start()
        options = rpc_options(self._folder.name)
        rpc.init_rpc("caller", rank=0, world_size=processes + 1, rpc_backend_options=options)

    def run(self, function: Function, items: list[Tensor]) -> Outcome:
        import torch.distributed.autograd as distributed
        import torch.distributed.rpc as rpc

        calls = chunks(items, self.CALLS * len(self._names))
        with distributed.context() as context:
            futures = [
                rpc.rpc_async(self._names[number % len(self._names)], losses_of, (function, chunk))
                for number, chunk in enumerate(calls)
            ]
            losses = [loss for future in futures for loss in future.wait()]
            distributed.backward(context, [torch.stack(losses).sum()])
            gradients = distributed.get_gradients(context)
            return Outcome([loss.detach() for loss in losses], [gradients[item] for item in items])

    def close(self) -> None:
        import torch.distributed.rpc as rpc

        rpc.shutdown()
        for worker in self._workers:
            worker.join()
        self._folder.cleanup()


def chunks(items: Sequence[Any], most: int) -> list[list[Any]]:
    """As `multiprocessing.Pool.map` cuts them with four chunks a worker."""
    size = -(-len(items) // most)
    return [list(items[first : first + size]) for first in range(0, len(items), size)]


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
