"""The engines by name. Nobody outside this package compares one; a new one is added here (see `engines.protocol`)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import Any, Literal, NamedTuple

from mpgrad.engines.inline import InlineEngine
from mpgrad.engines.launch import ThreadLauncher, process_launcher
from mpgrad.engines.protocol import Engine, Traits
from mpgrad.engines.sockets import SocketEngine

__all__ = ["ENGINES", "EngineName", "Kind", "Wanted", "traits_of"]

EngineName = Literal["process", "thread", "inline", "stream", "ray"]


class Wanted(NamedTuple):
    """What a pool was asked for, as far as engines differ in it."""

    workers: int | None = None  # None: as many as there is room for
    context: BaseContext | str | None = None  # of multiprocessing
    ray: Any = None  # a `cluster.ray.Ray`
    threads: int | None = None  # of each worker


class Kind(NamedTuple):
    traits: Traits
    make: Callable[[Wanted], Engine]


def processes(wanted: Wanted) -> Engine:
    return SocketEngine(process_launcher(wanted.context, wanted.threads))


def threads(wanted: Wanted) -> Engine:
    return SocketEngine(ThreadLauncher())


def inline(wanted: Wanted) -> Engine:
    return InlineEngine()


def ray_cluster(wanted: Wanted) -> Engine:
    # by its name: `cluster` is another package, which few need
    package = importlib.import_module("mpgrad.cluster.ray")
    engine: Engine = package.ray_engine(wanted.ray, wanted.workers)
    return engine


ENGINES = {
    "process": Kind(
        Traits(is_process=True, own_generators=True, may_resize=True, on_cpu=True, on_devices=True),
        processes,
    ),
    "thread": Kind(
        Traits(is_process=False, own_generators=False, may_resize=True, on_cpu=True, on_devices=False),
        threads,
    ),
    "inline": Kind(
        Traits(is_process=False, own_generators=True, may_resize=False, on_cpu=True, on_devices=False, in_caller=True),
        inline,
    ),
    "stream": Kind(
        Traits(is_process=False, own_generators=False, may_resize=True, on_cpu=False, on_devices=True),
        threads,
    ),
    "ray": Kind(
        Traits(is_process=True, own_generators=True, may_resize=True, on_cpu=True, on_devices=False, remote=True),
        ray_cluster,
    ),
}


def traits_of(engine: str) -> Traits:
    """
    Raises:
        ValueError: there is no such engine.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)} (engine: {engine!r})")
    return ENGINES[engine].traits
