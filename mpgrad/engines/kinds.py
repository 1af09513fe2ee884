"""The engines by name. Nobody outside this package compares one; a new one is added here (see `engines.protocol`)."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import NamedTuple

from mpgrad.engines.inline import InlineEngine
from mpgrad.engines.launch import ThreadLauncher, process_launcher
from mpgrad.engines.protocol import Engine, Traits
from mpgrad.engines.sockets import SocketEngine

__all__ = ["ENGINES", "Kind", "traits_of"]

Context = BaseContext | str | None  # of multiprocessing, for `Pool(context=...)`


class Kind(NamedTuple):
    traits: Traits
    make: Callable[[Context], Engine]


def processes(context: Context) -> Engine:
    return SocketEngine(process_launcher(context))


def threads(context: Context) -> Engine:
    return SocketEngine(ThreadLauncher())


def inline(context: Context) -> Engine:
    return InlineEngine()


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
}


def traits_of(engine: str) -> Traits:
    """
    Raises:
        ValueError: there is no such engine.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)} (engine: {engine!r})")
    return ENGINES[engine].traits
