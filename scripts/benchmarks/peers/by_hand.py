"""Peers whose gradients end at the process border, with the best that is written by hand around them.

One call runs forward and backward of several items in the worker, and returns losses and gradients: possible because the loss
is a sum, so that every item's incoming gradient is known beforehand. Arrays travel, where tensors would travel badly.
Peers that do not cut a map into chunks themselves get those that multiprocessing.Pool makes.
"""

from __future__ import annotations

import importlib
import os
import resource
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing
from torch import Tensor

from peers.case import Function, Outcome, chunks
from peers.native import with_one_backward

CHUNKS = 4  # for each worker, as multiprocessing.Pool has it
MIB = 2**20

Array = np.ndarray[Any, np.dtype[np.float32]]
Run = Callable[[Function, list[Tensor]], Outcome]


def tensor_pair(function: Function, item: Tensor) -> tuple[Tensor, Tensor]:
    """One item's loss and gradient."""
    leaf = item.requires_grad_()
    loss = function(leaf)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


def array_pair(function: Function, item: Array) -> tuple[Array, Array]:
    loss, gradient = tensor_pair(function, torch.from_numpy(item))
    return loss.numpy(), gradient.numpy()


def array_pairs(function: Function, items: Sequence[Array]) -> list[tuple[Array, Array]]:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        # arrays in a store that several processes read cannot be written, and nobody does
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return [array_pair(function, item) for item in items]


def arrays_of(items: Sequence[Tensor]) -> list[Array]:
    return [item.detach().numpy() for item in items]


def outcome_of(pairs: Sequence[tuple[Array, Array]]) -> Outcome:
    return Outcome(*([torch.from_numpy(np.asarray(one)) for one in side] for side in zip(*pairs, strict=True)))


# --- torch.multiprocessing.Pool


def prepare_worker(strategy: str) -> None:
    torch.set_num_threads(1)
    torch.multiprocessing.set_sharing_strategy(strategy)  # type: ignore[no-untyped-call]


class TorchPool:
    def __init__(self, processes: int, strategy: str, arrays: bool = False) -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # three open files a tensor; many systems allow 1,024
        prepare_worker(strategy)
        context = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch"])
        self._arrays = arrays
        self._pool = context.Pool(processes, prepare_worker, (strategy,))

    def run(self, function: Function, items: list[Tensor]) -> Outcome:
        if self._arrays:
            return outcome_of(self._pool.map(partial(array_pair, function), arrays_of(items)))
        pairs = self._pool.map(partial(tensor_pair, function), [item.detach() for item in items])
        return Outcome([loss for loss, _ in pairs], [gradient for _, gradient in pairs])

    def close(self) -> None:
        self._pool.terminate()
        self._pool.join()


class AllInArrays(torch.autograd.Function):
    """One node for the whole map, which has the gradients of all items before it is asked for them."""

    @staticmethod
    def forward(ctx: Any, run: Run, function: Function, *items: Tensor) -> Any:
        losses, ctx.gradients = run(function, list(items))
        return tuple(losses)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        pairs = zip(ctx.gradients, grads, strict=True)
        return None, None, *[gradient if grad == 1 else gradient * grad for gradient, grad in pairs]


class NativeArrays(TorchPool):
    """Arrays, behind losses with gradients of their own: the least that gives what mpgrad gives, for one backward over all."""

    def __init__(self, processes: int) -> None:
        super().__init__(processes, "file_descriptor", arrays=True)

    def run(self, function: Function, items: list[Tensor]) -> Outcome:
        losses = AllInArrays.apply(super().run, function, *items)  # type: ignore[no-untyped-call]
        return with_one_backward(losses, items)


# --- others


class InChunks:
    """A map of chunks of arrays, in whatever way a peer maps."""

    _map: Callable[[Callable[[list[Array]], Any], list[list[Array]]], Sequence[Any]]

    def __init__(self, processes: int) -> None:
        torch.set_num_threads(1)
        self._most = CHUNKS * processes

    def run(self, function: Function, items: list[Tensor]) -> Outcome:
        found = self._map(partial(array_pairs, function), chunks(arrays_of(items), self._most))
        return outcome_of([pair for part in found for pair in part])


class Joblib:
    """It makes its own batches, and hands over arrays above 1 MB as files in memory; written to by nobody but their reader."""

    def __init__(self, processes: int) -> None:
        torch.set_num_threads(1)
        self._joblib = importlib.import_module("joblib")
        self._parallel = self._joblib.Parallel(processes, backend="loky", mmap_mode="c")
        self._parallel.__enter__()

    def run(self, function: Function, items: list[Tensor]) -> Outcome:
        pair = self._joblib.delayed(one_array_pair)
        return outcome_of(self._parallel(pair(function, item) for item in arrays_of(items)))

    def close(self) -> None:
        self._parallel.__exit__(None, None, None)
        importlib.import_module("joblib.externals.loky").get_reusable_executor().shutdown(wait=True)


def one_array_pair(function: Function, item: Array) -> tuple[Array, Array]:
    return array_pairs(function, [item])[0]


def start_ray(processes: int) -> Any:
    ray = importlib.import_module("ray")
    ray.init(
        num_cpus=processes,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=1024 * MIB,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(Path(os.environ["TMPDIR"]) / "ray"),
    )
    return ray


class RayTasks(InChunks):
    def __init__(self, processes: int) -> None:
        super().__init__(processes)
        self._ray = start_ray(processes)
        self._task = self._ray.remote(call)

    def _map(self, function: Callable[[list[Array]], Any], parts: list[list[Array]]) -> list[Any]:
        results: list[Any] = self._ray.get([self._task.remote(function, part) for part in parts])
        return results

    def close(self) -> None:
        self._ray.shutdown()


class RayActors(InChunks):
    def __init__(self, processes: int) -> None:
        super().__init__(processes)
        self._ray = start_ray(processes)
        actor = self._ray.remote(Caller)
        self._actors = importlib.import_module("ray.util").ActorPool([actor.remote() for _ in range(processes)])

    def _map(self, function: Callable[[list[Array]], Any], parts: list[list[Array]]) -> list[Any]:
        return list(self._actors.map(lambda actor, part: actor.call.remote(function, part), parts))

    def close(self) -> None:
        self._ray.shutdown()


def call(function: Callable[[Any], Any], argument: Any) -> Any:
    return function(argument)


class Caller:
    def call(self, function: Callable[[Any], Any], argument: Any) -> Any:
        return function(argument)


class Dask(InChunks):
    def __init__(self, processes: int) -> None:
        super().__init__(processes)
        distributed = importlib.import_module("distributed")
        self._cluster = distributed.LocalCluster(
            processes, threads_per_worker=1, processes=True, host="127.0.0.1", dashboard_address=None
        )
        self._client = distributed.Client(self._cluster)

    def _map(self, function: Callable[[list[Array]], Any], parts: list[list[Array]]) -> list[Any]:
        # pure=False: it would hash all arrays, to find results that it has already
        results: list[Any] = self._client.gather(self._client.map(function, parts, pure=False))
        return results

    def close(self) -> None:
        self._client.close()
        self._cluster.close()


class Mpi(InChunks):
    """Workers are spawned by MPI itself, from a process that was started without mpiexec."""

    def __init__(self, processes: int) -> None:
        super().__init__(processes)
        os.environ["HYDRA_IFACE"] = os.environ["FI_TCP_IFACE"] = "lo"
        futures = importlib.import_module("mpi4py.futures")
        self._executor = futures.MPIPoolExecutor(processes, main=False)
        self._executor.bootup(wait=True)

    def _map(self, function: Callable[[list[Array]], Any], parts: list[list[Array]]) -> list[Any]:
        return list(self._executor.map(function, parts))

    def close(self) -> None:
        self._executor.shutdown()
