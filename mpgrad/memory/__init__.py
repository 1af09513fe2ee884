"""Shared memory: slots in slabs, which processes lend and return. Both sides use this package.

The package imports `torch_state`, `errors` and `system`. The owner of a slot writes it before
lending it, and reuses it only after all borrowers have returned it.

    arena         slabs, slots and borrowed memory, also after a fork
    accelerator   the same on devices, and how processes wait for each other's work there

An address is the same in all processes. It encodes the slab, the slab's owner, and the offset. This
module does not import torch.
"""

from __future__ import annotations

__all__ = ["KIND_BITS", "OFFSET_BITS", "OFFSET_MASK", "OWNER_BITS", "owner_of", "slab_of"]


# --- addresses


OFFSET_BITS = 44  # an address is slab << OFFSET_BITS | offset
OFFSET_MASK = (1 << OFFSET_BITS) - 1
OWNER_BITS = 32  # a slab's number is owner << OWNER_BITS | kind << KIND_BITS | count
KIND_BITS = 24


def slab_of(address: int) -> int:
    return address >> OFFSET_BITS


def owner_of(slab: int) -> int:
    """Return the owner of a slab's arena: 0 for the caller, otherwise a worker's number."""
    return slab >> OWNER_BITS
