"""On which devices the workers of a pool stand."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mpgrad.calls.device_choice import Device, device_code_named, device_count
from mpgrad.engines.kinds import ENGINES, traits_of
from mpgrad.memory.accelerator import INSTALLED

__all__ = ["worker_devices"]


def worker_devices(
    devices: Device | Sequence[Device] | None, processes: int | None, engine: str, context: object
) -> tuple[int, ...] | None:
    """The code of each worker's device (see `accelerator.device_code`), for `Pool(devices=...)`; None where that is None.

    Raises:
        ValueError, TypeError: a device that does not exist, or that this engine or number of processes does not go with.
    """
    traits = traits_of(engine)
    if devices is None:
        if not traits.on_cpu:
            raise ValueError(f'engine "{engine}" runs on a GPU; say on which (devices="cuda:0", processes=4)')
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
        raise TypeError(f"devices must be a device, or a list of one for each worker (devices: {devices!r})")
    if not codes:
        raise ValueError(f"devices must name at least one (devices: {devices!r})")
    if processes is not None and processes != len(codes):
        raise ValueError(f"devices say how many workers there are ({len(codes)}); leave processes out (processes: {processes})")
    if not traits.on_cpu and 0 in codes:
        raise ValueError(f'engine "{engine}" runs on GPUs only; use "thread" on the CPU (devices: {devices!r})')
    if any(codes) and getattr(context, "_name", context) == "fork":
        raise ValueError('a forked process cannot use the GPUs of its parent (context: "fork"); leave context out, or "spawn"')
    return tuple(codes)
