"""The slabs of a site's workers in which results stay, mapped here. Runs on the node; needs no torch."""

from __future__ import annotations

import mmap
import os

from mpgrad.memory.addresses import OFFSET_MASK, slab_of

__all__ = ["WorkerSlabs"]


class WorkerSlabs:
    """They stay mapped, also when their worker is gone, until the caller lets them go."""

    def __init__(self) -> None:
        self._slabs: dict[int, mmap.mmap] = {}

    def show(self, number: int, descriptor: int, nbytes: int) -> None:
        """Takes the descriptor. What cannot be mapped counts as lost."""
        try:
            self._slabs[number] = mmap.mmap(descriptor, nbytes)
        except (OSError, ValueError):
            pass
        finally:
            os.close(descriptor)

    def read(self, address: int, nbytes: int) -> memoryview | None:
        """What lies there; None where it is lost."""
        slab = self._slabs.get(slab_of(address))
        offset = address & OFFSET_MASK
        return None if slab is None else memoryview(slab)[offset : offset + nbytes]

    def release(self, number: int) -> None:
        self._slabs.pop(number, None)  # unmapped with the last view
