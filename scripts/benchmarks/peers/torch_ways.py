"""What PyTorch itself offers with gradients: torch.jit.fork and torch.distributed.rpc."""

# torch.jit has no types
# mypy: disable-error-code="no-untyped-call,misc"

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.multiprocessing
from descendants import end_with_parent
from losses import large_loss, op_loss, python_loss
from torch import Tensor

from peers.case import Function, Outcome, chunks
from peers.native import with_one_backward

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
        self._scripted: dict[Any, Callable[..., list[Tensor]]] = {one: torch.jit.script(every) for one, every in pairs}

    def run(self, function: Function, items: list[Tensor]) -> Outcome:
        if isinstance(function, partial):
            return with_one_backward(self._scripted[function.func](items, **function.keywords), items)
        return with_one_backward(self._scripted[function](items), items)

    def close(self) -> None:
        pass


# --- torch.distributed.rpc


def rpc_options(folder: str) -> Any:
    rpc = importlib.import_module("torch.distributed.rpc")
    os.environ["TP_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    return rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/meeting", _transports=["shm", "uv"])


def serve_rpc(rank: int, world: int, folder: str, parent: int) -> None:
    rpc = importlib.import_module("torch.distributed.rpc")
    end_with_parent(parent)
    torch.set_num_threads(1)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world, rpc_backend_options=rpc_options(folder))
    rpc.shutdown()  # waits for the others to do the same


def losses_of(function: Function, items: list[Tensor]) -> list[Tensor]:
    return [function(item) for item in items]


class Rpc:
    """Remote calls of several items each, and distributed autograd, whose backward runs on all workers at once."""

    CALLS = 4  # to each worker: few enough to cost little, enough to balance

    def __init__(self, processes: int) -> None:
        rpc = importlib.import_module("torch.distributed.rpc")
        torch.set_num_threads(1)
        self._folder = tempfile.TemporaryDirectory()
        self._names = [f"worker{rank}" for rank in range(1, processes + 1)]
        context = torch.multiprocessing.get_context("spawn")
        self._workers = [
            context.Process(target=serve_rpc, args=(rank, processes + 1, self._folder.name, os.getpid()))
            for rank in range(1, processes + 1)
        ]
        for worker in self._workers:
            worker.start()
        options = rpc_options(self._folder.name)
        rpc.init_rpc("caller", rank=0, world_size=processes + 1, rpc_backend_options=options)

    def run(self, function: Function, items: list[Tensor]) -> Outcome:
        distributed = importlib.import_module("torch.distributed.autograd")
        rpc = importlib.import_module("torch.distributed.rpc")
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
        rpc = importlib.import_module("torch.distributed.rpc")
        rpc.shutdown()
        for worker in self._workers:
            worker.join()
        self._folder.cleanup()
