"""What every worker of a pool starts with, and on which device each of them works. Caller's
side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from mpgrad.calls.packing import Device, device_code_named, device_count
from mpgrad.engines.kinds import ENGINES, traits_of
from mpgrad.environment import Since
from mpgrad.memory.accelerator import INSTALLED

__all__ = ["Settings", "worker_devices"]


class Settings(NamedTuple):
    """What a scheduler is made with; some of it is told to each worker (`Start`)."""

    workers: int
    initializer: bytes  # pickle of (function or None, arguments)
    threads: int | None  # intra-op; None: nobody has said how many
    calls: int | None  # after which a worker is replaced
    retries: int  # of a call whose worker died; 0: what is lost is lost
    graph_bytes: int | None  # of graphs in each worker; beyond, they are dropped and made again
    spares_memory: bool  # graphs are dropped, too, where memory is about to end
    devices: tuple[int, ...] | None = None  # the code of each worker's device
    in_process: bool = False  # workers are threads of this process: they cannot be killed
    remote: bool = False  # workers may be on other machines
    # the caller's environment when the pool began, where workers follow it
    since: Since | None = None
    in_caller: bool = False  # calls run in the thread that waits for them

    @property
    def recoverable(self) -> bool:
        """Whether calls are kept as long as their graphs, to be run again."""
        return self.retries > 0 or self.graph_bytes is not None


def worker_devices(
    devices: Device | Sequence[Device] | None, processes: int | None, engine: str, context: object
) -> tuple[int, ...] | None:
    """The code of each worker's device (see `accelerator.device_code`), for `Pool(devices=...)`;
    None where that is None.

    Raises:
        ValueError, TypeError: a device that does not exist, or that this engine or number of
            processes does not go with.
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
