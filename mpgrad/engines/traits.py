"""The engines by name, and in what they differ for who uses them. Nobody outside this package compares an engine's name."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ENGINES", "Traits", "traits_of"]


class Traits(NamedTuple):
    is_process: bool  # a worker is a process of its own: it can be killed, and what it had given to another one
    own_generators: bool  # a worker draws random numbers of its own, so that an item can have a seed
    may_resize: bool
    on_cpu: bool
    on_devices: bool


ENGINES = {
    "process": Traits(is_process=True, own_generators=True, may_resize=True, on_cpu=True, on_devices=True),
    "thread": Traits(is_process=False, own_generators=False, may_resize=True, on_cpu=True, on_devices=False),
    "inline": Traits(is_process=False, own_generators=True, may_resize=False, on_cpu=True, on_devices=False),
    "stream": Traits(is_process=False, own_generators=False, may_resize=True, on_cpu=False, on_devices=True),
}


def traits_of(engine: str) -> Traits:
    """
    Raises:
        ValueError: there is no such engine.
    """
    if engine not in ENGINES:
        raise ValueError(f"engine must be one of {', '.join(ENGINES)} (engine: {engine!r})")
    return ENGINES[engine]
