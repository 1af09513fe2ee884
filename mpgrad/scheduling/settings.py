"""The settings of a scheduler, and the devices of its workers. This module runs in the caller
only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from mpgrad.calls.packing import Device, device_code_named, device_count
from mpgrad.engines.kinds import ENGINES, traits_of
from mpgrad.environment import EnvironmentChanges
from mpgrad.memory.accelerator import INSTALLED

__all__ = ["Settings", "worker_devices"]


class Settings(NamedTuple):
    """Holds the settings of a scheduler. Each worker is sent some of them (`Start`)."""

    workers: int
    # the pickle of (function or None, arguments)
    initializer: bytes
    # intra-op threads; None if no number was given
    threads: int | None
    # A worker is replaced after this many calls.
    calls: int | None
    # how often a call runs again after its worker died; with 0, lost work stays lost
    retries: int
    # how often a call runs again after it took too long
    timeout_retries: int
    # how many bytes graphs in a worker may take; beyond that they are dropped and rebuilt
    graph_bytes: int | None
    # Graphs are also dropped if memory is about to run out.
    spares_memory: bool
    # the code of each worker's device
    devices: tuple[int, ...] | None = None
    # Workers are threads of this process, so they cannot be killed.
    in_process: bool = False
    # Workers may be on other machines.
    remote: bool = False
    # changes of the caller's environment since the pool began, if workers follow it
    since: EnvironmentChanges | None = None
    # Calls run in the thread that waits for them.
    in_caller: bool = False
    # modules that are being imported by the thread that has made the pool
    importing: frozenset[str] = frozenset()

    @property
    def recoverable(self) -> bool:
        """Whether calls are kept as long as their graphs, so that they can run again."""
        return self.retries > 0 or self.graph_bytes is not None


def worker_devices(
    devices: Device | Sequence[Device] | None, processes: int | None, engine: str, context: object
) -> tuple[int, ...] | None:
    """Return the code of each worker's device for `Pool(devices=...)`, or None if that is None.

    `accelerator.device_code` makes the codes.

    Raises:
        ValueError, TypeError: a device does not exist, or does not fit the engine or the number of
            processes.
    """
    traits = traits_of(engine)
    if devices is None:
        if not traits.on_cpu:
            raise ValueError(
                f'engine "{engine}" runs on a GPU; say on which (devices="cuda:0", processes=4)'
            )
        return None
    if not traits.on_devices:
        others = ", ".join(name for name, each in ENGINES.items() if each.traits.on_devices)
        raise ValueError(f"devices are for engines {others} (engine: {engine!r})")
    kind = INSTALLED.accelerator.type
    if isinstance(devices, str) and devices == kind:
        codes = [code + 1 for code in range(device_count(devices))]
    elif isinstance(devices, (str, torch.device)):
        codes = [device_code_named(devices, "devices")] * (1 if processes is None else processes)
    elif isinstance(devices, Sequence):
        codes = [device_code_named(device, "devices") for device in devices]
    else:
        raise TypeError(
            f"devices must be a device, or a list of one for each worker (devices: {devices!r})"
        )
    if not codes:
        raise ValueError(f"devices must name at least one (devices: {devices!r})")
    if processes is not None and processes != len(codes):
        raise ValueError(
            f"devices say how many workers there are ({len(codes)}); leave processes out "
            f"(processes: {processes})"
        )
    if not traits.on_cpu and 0 in codes:
        raise ValueError(
            f'engine "{engine}" runs on GPUs only; use "thread" on the CPU (devices: {devices!r})'
        )
    if any(codes) and getattr(context, "_name", context) == "fork":
        raise ValueError(
            'a forked process cannot use the GPUs of its parent (context: "fork"); leave context '
            'out, or "spawn"'
        )
    return tuple(codes)
