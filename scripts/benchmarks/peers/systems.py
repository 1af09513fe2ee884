"""All systems by name, and what each needs to be installed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from peers.by_hand import Dask, Joblib, Mpi, NativeArrays, RayActors, RayTasks, TorchPool
from peers.case import System
from peers.native import Mpgrad, Serial, Threads
from peers.torch_ways import JitFork, Rpc


class Kind(NamedTuple):
    start: Callable[[int], System]
    distribution: str = "torch"
    bears_stopping: bool = True  # its processes do not take one another for dead when all stop for a while


SYSTEMS = {
    "serial": Kind(Serial),
    "serial, at once": Kind(partial(Serial, at_once=True)),
    "serial, 2 threads": Kind(partial(Serial, threads=2)),
    "serial, 2 threads, at once": Kind(partial(Serial, threads=2, at_once=True)),
    "threads": Kind(Threads),
    "torch.jit.fork": Kind(JitFork),
    "torch Pool, file_descriptor": Kind(partial(TorchPool, strategy="file_descriptor")),
    "torch Pool, file_system": Kind(partial(TorchPool, strategy="file_system")),
    "torch Pool, arrays": Kind(partial(TorchPool, strategy="file_descriptor", arrays=True)),
    "torch Pool, native arrays": Kind(NativeArrays),
    "torch.distributed.rpc": Kind(Rpc),
    "joblib": Kind(Joblib, "joblib"),
    "Ray tasks": Kind(RayTasks, "ray", bears_stopping=False),
    "Ray actors": Kind(RayActors, "ray", bears_stopping=False),
    "dask.distributed": Kind(Dask, "distributed", bears_stopping=False),
    "mpi4py.futures": Kind(Mpi, "mpi4py"),
    "mpgrad, keep": Kind(partial(Mpgrad, graphs="keep"), "mpgrad"),
    "mpgrad, ahead": Kind(partial(Mpgrad, graphs="ahead"), "mpgrad"),
    "mpgrad": Kind(Mpgrad, "mpgrad"),  # the defaults: what a user gets who asks for nothing
}
SERIAL = [name for name in SYSTEMS if name.startswith("serial")]
OURS = [name for name in SYSTEMS if name.startswith("mpgrad")]
IN_ONE_PROCESS = [*SERIAL, "threads", "torch.jit.fork"]


def version_of(name: str) -> str | None:
    """Of what it needs; None where that is not installed."""
    try:
        return importlib.metadata.version(SYSTEMS[name].distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
