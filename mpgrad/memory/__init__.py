"""Memory that processes share: slots in slabs, lent and given back. Both sides.

Imports `torch_state`, `errors`, `system`. A slot is its owner's: written before it is lent, used
again when all gave it back.

    arena         slabs, slots, what is borrowed, and what a forked child sees of that
    accelerator   the same on devices, and who waits for whom there

Addresses are the same in all processes, and say which slab, where in it, and whose. Needs no torch.
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
    """Whose arena has made the slab with this number: 0 for the caller, else a worker's number."""
    return slab >> OWNER_BITS
