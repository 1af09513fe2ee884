"""Memory that processes share: slots in slabs, lent and given back. Both sides.

Imports `torch_state`, `errors`, `system`. A slot is its owner's: written before it is lent, used
again when all gave it back.

    addresses     which slab, where in it, and whose; needs no torch
    arena         slabs, slots, what is borrowed, and what a forked child sees of that
    accelerator   the same on devices, and who waits for whom there
"""
